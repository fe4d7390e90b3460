"""This package holds helpers that several test modules use, one concept per file. It imports no test module and no
conftest."""
