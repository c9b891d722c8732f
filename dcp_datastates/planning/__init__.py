"""Plans in columns: what each rank holds, who writes which part of it, and the metadata of the whole."""
