"""Trains a DINOv2-architecture ViT from scratch on labelled images; by default on scikit-learn's digits."""

from raptor_hf.teacher_training import main

if __name__ == "__main__":
    main()
