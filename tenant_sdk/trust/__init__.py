"""What a tenant believes of a provider that it does not verify: values pinned at first use, and rules for a config."""
