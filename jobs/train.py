"""Train a job on a Ray cluster: ray job submit --working-dir . -- python jobs/train.py jobs/configs/emoji.yaml"""

from _entry import run

if __name__ == "__main__":
    run("train")
