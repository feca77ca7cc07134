"""The `pccl` command and what its subcommands do."""
