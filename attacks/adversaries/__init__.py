"""The adversaries, one in each file; none of these modules can import a tenant, a mask or the truth."""
