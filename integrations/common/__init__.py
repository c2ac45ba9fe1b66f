"""What the integrations of all frameworks share."""
