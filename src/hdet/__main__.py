"""``python -m hdet`` is the ``hdet`` command; it is what torchrun starts on every rank."""

from hdet.lab.cli import main

if __name__ == "__main__":
    main()
