"""Standard input of tasks: forwarded, fetched, served and stored."""
