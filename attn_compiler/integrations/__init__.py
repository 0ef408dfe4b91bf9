"""One module for each supported library. Each imports its library, so users import it themselves."""
