"""What a flag turns on. config.extra() imports it by name; without extras/ all else still runs."""
