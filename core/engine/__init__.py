"""One save, from the request to the committed checkpoint: plan, encode, commit, retain, report."""
