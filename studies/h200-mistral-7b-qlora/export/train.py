# autotune study h200-mistral-7b-qlora: mistralai/Mistral-7B-v0.3 on h200-sxm; Configuration: lora r16 nf4 16x1024 bf16_mixed ckpt-none adamw_torch_fused compiled, 2 micro batches a step
# Expect (measured): 1.9 s a step, 17,306 useful tokens/s, peak 83.5 GiB of 132.1 GiB; Full run: 10,000 examples, 1 epoch(s), 313 steps: 9 min 53 s (9 min 52 s to 9 min 54 s), $0.558
# Probed with transformers on NVIDIA H200, driver 580.159.04, CUDA 13.0; Fingerprint 85cb2340ae10: python 3.12.3, accelerate 1.15.0, peft 0.21.0, torch 2.11.0, transformers 5.17.0
"""Fine-tunes with exactly the configuration that was probed, through transformers.Trainer and peft."""
import argparse, copy, json, os, pathlib, statistics, sys, time, types  # noqa: E401, I001

run = types.SimpleNamespace(**{
    'model': 'mistralai/Mistral-7B-v0.3', 'has_weights': True, 'method': 'lora', 'micro_batch_size': 16,
    'seq_len': 1024, 'lora_rank': 16, 'optimizer': 'adamw_torch_fused', 'precision': 'bf16_mixed',
    'quantization': 'nf4', 'double_quant': False, 'checkpointing': 'none', 'attention': 'sdpa',
    'compile': 'per_layer', 'base_dtype': 'bfloat16',
    'bitsandbytes': {'load_in_4bit': True, 'bnb_4bit_quant_type': 'nf4', 'bnb_4bit_use_double_quant': False},
    'linear': {'compress_statistics': False, 'quant_type': 'nf4'},
    'lora': {'r': 16, 'lora_alpha': 32, 'lora_dropout': 0.0, 'target_modules': 'all-linear', 'task_type': 'CAUSAL_LM'},
    'checkpoint_every': None, 'examples': 10000, 'epochs': 1, 'accumulation': 2, 'learning_rate': 0.0002,
    'warmup_steps': 9, 'save_steps': 313})
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # torch reads it when it starts
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # one GPU, as measured: Trainer would split batches over all
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=run.model, metavar="NAME_OR_DIR", help="Hub name or directory of the weights")
parser.add_argument("--dataset", metavar="FILE.jsonl", help="lines with text, prompt and completion, or messages")
parser.add_argument("--random-weights", action="store_true", help="random weights and tokens, to measure the speed")
parser.add_argument("--max-steps", type=int, default=-1, metavar="N", help="stop after N optimizer steps")
parser.add_argument("--output-dir", default="out", help="for checkpoints and what was trained")
args = parser.parse_args()
no_weights = args.model == run.model and not run.has_weights
if no_weights and args.dataset:
    parser.error("this model has no published weights: name another with --model, or leave --dataset out")
if args.random_weights == bool(args.dataset) and not no_weights:
    parser.error("give either --dataset FILE.jsonl to train, or --random-weights to measure the speed alone")

# Heavy imports wait until the arguments are known to be right.
import torch, transformers as hf, transformers.initialization, transformers.modeling_layers  # noqa: E401, E402
from peft import LoraConfig, get_peft_model  # noqa: E402
cuda, dtype = torch.cuda.is_available(), getattr(torch, run.base_dtype)
device = torch.device("cuda:0" if cuda else "cpu")
build, rows = {"dtype": dtype, "attn_implementation": run.attention}, []
hf.set_seed(0)
if args.dataset:  # real weights: safetensors only, never code from the Hub
    tok = hf.AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    for number, line in enumerate(open(args.dataset, encoding="utf-8"), 1):
        try:
            row = json.loads(line)
            chat = "messages" in row  # a chat template writes its own special tokens
            text = row["text"] if "text" in row else "" if chat else row["prompt"] + row["completion"]
            text = tok.apply_chat_template(row["messages"], tokenize=False) if chat else text + (tok.eos_token or "")
        except (ValueError, TypeError, KeyError) as error:
            sys.exit(f"{args.dataset}:{number}: needs text, prompt and completion, or messages: {error!r}")
        ids = tok(text, truncation=True, max_length=run.seq_len, add_special_tokens=not chat)["input_ids"]
        rows.append(torch.tensor(ids))
    if run.bitsandbytes:
        build["quantization_config"] = hf.BitsAndBytesConfig(**run.bitsandbytes, bnb_4bit_compute_dtype=dtype)
    build |= {"device_map": {"": device}, "use_safetensors": True, "trust_remote_code": False}
    model = hf.AutoModelForCausalLM.from_pretrained(args.model, **build)
else:  # random weights of the same shape, full rows of random tokens
    shape = json.loads(pathlib.Path(__file__).with_name("model_config.json").read_text(encoding="utf-8"))
    # A base to be quantised is laid out in CPU memory that nothing touches; one layer of each size is then copied.
    with torch.device("cpu") if run.bitsandbytes else device, hf.initialization.no_init_weights():
        shape = hf.AutoConfig.for_model(shape.pop("model_type"), **shape)
        model = hf.AutoModelForCausalLM.from_config(shape, **build)
    linears, made = [(name, layer) for name, layer in model.named_modules() if type(layer) is torch.nn.Linear], {}
    for name, layer in linears if run.bitsandbytes else ():
        import bitsandbytes as bnb
        kwargs = run.linear | ({"compute_dtype": dtype} if run.quantization == "nf4" else {})
        kind = bnb.nn.Linear4bit if run.quantization == "nf4" else bnb.nn.Linear8bitLt
        size = (layer.in_features, layer.out_features, layer.bias is not None)
        if layer is not model.get_output_embeddings():
            made[size] = copy.deepcopy(made[size]) if size in made else kind(*size, **kwargs).to(dtype).to(device)
            model.set_submodule(name, made[size])
    for name, weight in model.to(device).named_parameters():  # norms keep their ones
        if weight.is_floating_point() and (weight.ndim > 1 or name.endswith("bias")):
            weight.data.normal_(0.0, 0.02 if weight.ndim > 1 else 0.0)
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = run.quantization == "nf4", run.quantization == "int8"
    rows = ([*torch.randint(0, model.config.vocab_size, (64, run.seq_len))] * (run.examples // 64 + 1))[: run.examples]

model.config.use_cache = False
layers = [layer for layer in model.modules() if isinstance(layer, hf.modeling_layers.GradientCheckpointingLayer)]
if run.checkpoint_every:
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # renamed in 5.23
    enable({"use_reentrant": False})
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % run.checkpoint_every == 0
if run.lora:
    model = get_peft_model(model, LoraConfig(**run.lora), autocast_adapter_dtype=run.precision != "bf16_pure")
for layer in layers if run.compile == "per_layer" else ():
    layer.compile()

def collate(batch):
    """Pads on the right, without attention mask: under causal attention no token sees the padding after it."""
    pad, ends = torch.nn.functional.pad, [(0, run.seq_len - len(row)) for row in batch]
    values = {"input_ids": 0, "labels": -100}
    return {key: torch.stack([pad(row, end, value=values[key]) for row, end in zip(batch, ends)]) for key in values}

class Clock(hf.TrainerCallback):
    starts = []
    def on_step_begin(self, *_, **__):
        torch.cuda.synchronize() if cuda else None
        self.starts.append(time.perf_counter())
    on_train_end = on_step_begin

settings = hf.TrainingArguments(  # the learning rate is a common default, it was not tuned
    output_dir=args.output_dir, max_steps=args.max_steps, num_train_epochs=run.epochs, use_cpu=not cuda,
    per_device_train_batch_size=run.micro_batch_size, gradient_accumulation_steps=run.accumulation,
    optim=run.optimizer, bf16=run.precision == "bf16_mixed", fp16=run.precision == "fp16_mixed", max_grad_norm=1.0,
    learning_rate=run.learning_rate, lr_scheduler_type="cosine", warmup_steps=run.warmup_steps, logging_steps=10,
    save_strategy="steps" if args.dataset and args.max_steps < 1 else "no", save_steps=run.save_steps, report_to=[],
    logging_nan_inf_filter=False, dataloader_drop_last=True, dataloader_pin_memory=cuda)
trainer = hf.Trainer(model=model, args=settings, train_dataset=rows, data_collator=collate, callbacks=[Clock()])
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats() if cuda else None
steps = trainer.train().global_step
if args.dataset:
    trainer.save_model(args.output_dir)
times = [end - start for start, end in zip(Clock.starts[1:], Clock.starts[2:])]  # the first step warms up
seconds = statistics.median(times) if times else None
tokens = run.micro_batch_size * run.accumulation * sum(map(len, rows)) / len(rows)  # padding does not count
peak = torch.cuda.max_memory_reserved() / 2**30 if cuda else None
print(json.dumps({"steps": steps, "seconds_per_step": seconds, "tokens_per_second": seconds and tokens / seconds,
                  "peak_reserved_gib": peak}))
