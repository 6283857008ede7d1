"""What every service shares; imports no service."""
