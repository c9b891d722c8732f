"""LoRA by TRL and PEFT. A checkpoint has the adapters, their optimizer and the position in the data.

python lora_sft_trainer.py Qwen/Qwen3-0.6B data.jsonl 200    # resumes when it is started again

The last checkpoint, as the folder that PEFT loads:

dcp-datastates convert job/checkpoint-200 adapter --to peft
"""

import sys

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

import dcp_datastates as ds
from dcp_datastates.huggingface import DataStatesTrainerMixin


class Trainer(DataStatesTrainerMixin, SFTTrainer):
    pass


model, data, steps = sys.argv[1:]
args = SFTConfig(
    output_dir="job",
    max_steps=int(steps),
    save_steps=5,
    save_total_limit=2,
    logging_steps=1,
    per_device_train_batch_size=2,
    learning_rate=1e-3,
    use_cpu=not torch.cuda.is_available(),
    report_to=[],
)
trainer = Trainer(
    model,
    args=args,
    train_dataset=load_dataset("json", data_files=data, split="train"),
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
)
trainer.train(resume_from_checkpoint=ds.latest("job"))  # None at the first start
