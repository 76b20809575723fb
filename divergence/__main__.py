"""``python -m divergence``: the command line, from an installed wheel or a bare checkout."""

from divergence.cli.main import run

if __name__ == "__main__":
    run()
