"""What several ranks load: one of them reads it from storage, and passes it on to the others."""
