"""This package repeats the Symbiosis paper's figures on placement: one provider for several fine-tuning clients,
against as many local processes. docs/placement.md has the results."""
