"""The commands of ``python -m research``, one file each."""
