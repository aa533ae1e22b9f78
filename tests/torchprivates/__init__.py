"""What this package reads, replaces or overrides of torch's private names: found in the source, explained in uses.toml.

    python -m torchprivates          # write docs/torch-privates.md
    python -m torchprivates --seen   # note in uses.toml which names this Python's torch has

`scan` finds the names, uses.toml says why each is needed and what breaks without it, `page` puts both together.
"""
