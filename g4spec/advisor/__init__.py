"""What works on which machine: facts as data (`data/*.toml`), and the checks behind `doctor` and
`recipe`.

    facts          load the data; schema and figures define its rows (source and date in each)
    machine        a machine, real (machine_probe) or assumed (cards): the same object
    named_models   the target and draft of a question; lookup finds them by name, model_files reads
                   their files, runtime_support asks g4spec's own runtime about them
    format_choice  a question, and the weight format that suits the machine best
    engines        one engine's verdict on a question
    memory_needs   memory arithmetic;  speed  bandwidth arithmetic;  backends  attention backends
    doctor         puts these together into a diagnosis;  recipe  commands;  logs  error texts
"""
