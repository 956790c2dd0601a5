"""What works on which machine: facts as data (`data/*.toml`), and the checks behind `doctor` and
`recipe`.

    facts     rows with source and date, checked by schema
    machine   a real machine (`probe`) or an assumed one: the same object
    subjects  what stands behind -m and -md, from files, folders, hub ids or short names
    choice    what is asked, and the weight format that answers it;  engines  each engine's verdict
    memory    arithmetic, step by step;  speed  bandwidth arithmetic;  backends  attention
    doctor    puts these together for one machine;  recipe  commands;  logs  error texts
"""
