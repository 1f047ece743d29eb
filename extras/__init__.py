"""What a flag turns on, imported in the branch of that flag; without extras/ all else runs."""
