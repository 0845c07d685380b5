"""Whether everything works with the oldest versions of libraries that are promised, and with the newest there are."""
