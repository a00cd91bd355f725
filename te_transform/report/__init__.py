"""The report of a conversion: text, table, HTML page and graphs."""
