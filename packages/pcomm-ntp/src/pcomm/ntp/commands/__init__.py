"""The subcommands of `pcomm` that come with this package."""
