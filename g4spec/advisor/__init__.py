"""Which models, drafts and engines work on which machine: facts as data (`data/*.toml`), and the
checks behind `doctor` and `recipe`.

    facts          loads the data; schema and figures define its rows, each with source and date
    machine        a machine: probed (machine_probe) or assumed (cards), of the same class
    named_models   the target and draft of a question; lookup finds them by name, model_files reads
                   their files (gguf_models, checkpoint_folders; like_published has what they lack),
                   runtime_support asks g4spec's own runtime about them
    format_choice  defines a question (a pair, and how to run it); chooses the weight format that
                   suits the machine best
    questions      builds a question from command-line options
    engines        judges whether an engine can run a pair on a machine: an engine_verdict
    memory_needs   computes memory; cache_sizes the part of the KV cache
    speed          estimates tokens per second
    backends       decides which attention backends of an engine can be used
    doctor         combines these into a diagnosis
    recipe         builds commands; recipe_values fills their placeholders
    logs           recognizes error messages
"""
