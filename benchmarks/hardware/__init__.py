"""What machines do. ``profile`` measures this one; the catalog's figures of a CPU are such a record's."""
