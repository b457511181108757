"""Files that are whole or not there: written to disk, checked, locked; a checkpoint's manifest. No tensors, no ranks."""
