"""Requests between the processes of a job, over TCP: for those only that know the job's secret."""
