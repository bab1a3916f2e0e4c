"""One file per framework, imported only when used."""
