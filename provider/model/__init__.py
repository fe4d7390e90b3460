"""The served model: found, loaded, traced into groups, quantised, and the bundle that tenants get."""
