"""This package repeats the Symbiosis paper's figures on placement. They compare several fine-tuning clients of one
provider with as many local processes. docs/placement.md has the results."""
