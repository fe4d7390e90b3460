"""What several test modules use: one thing a file, and nothing here imports a test module or a conftest."""
