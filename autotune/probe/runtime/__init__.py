"""What the probe and the exported training script share. Copied beside the script; imports nothing of autotune."""
