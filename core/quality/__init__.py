"""What a restore costs, measured and bounded: who decides with which settings a snapshot is stored."""
