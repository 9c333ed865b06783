"""A client's local work: schedules of updates, losses, exact evaluation."""
