"""The untrusted side: runs the base layers of a frozen model for enrolled tenants. Imports wire only."""
