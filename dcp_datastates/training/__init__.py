"""What a training loop consists of, as objects that DCP saves and loads: models, optimizers, what ranks have alone."""
