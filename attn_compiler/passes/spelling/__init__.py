"""Other spellings of attention become plain ones before anything is matched."""
