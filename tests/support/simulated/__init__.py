"""The commit protocol in simulated schedules."""
