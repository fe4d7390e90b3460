"""The catalogue, one adversary per file; none of these modules can import a tenant, a mask or the truth."""
