"""What a model scores: tasks of lm-evaluation-harness, and the loss on datasets, document by document."""
