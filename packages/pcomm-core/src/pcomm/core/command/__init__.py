"""The `pcomm` command and how it finds its subcommands."""
