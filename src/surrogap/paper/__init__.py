"""The paper: its theory, toys, tables and figures, as commands and as one study."""
