"""A client's local training: schedules, optimisers, updates and predictions."""
