"""Integration with Lightning, whose trainer saves and resumes as before."""
