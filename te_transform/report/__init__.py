"""What people see of a conversion."""
