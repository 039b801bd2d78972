#!/bin/bash
# A code model from nothing: text, training, held-out bits per byte, weights with a card, HumanEval. After pip install
# -r requirements.txt (-tpu, -cuda):
#
#   bash recipe.sh cpu        # two cores, 20 minutes: tiny, 1.3 M with 2,048 ids, on the standard library
#   bash recipe.sh t4         # Colab's GPU, an hour: small, 33 M, on 100 packages of PyPI; pip install pypi-simple
#   bash recipe.sh v5e        # Colab's older TPU, an hour: small on 300 packages; pip install pypi-simple
#   bash recipe.sh v6e        # one chip, a night: 300m on GitHub's Python; pip install datasets
#   bash recipe.sh v6e-16     # a pod of sixteen chips, a night: 1b; datasets. On each host; OUT, DATA in a bucket
#   OUT=out/run bash recipe.sh score    # only what comes after the training, on one machine, from a local copy
#
#   bash recipe.sh smollm     # two cores, an hour of steps: SmolLM2-135M-Instruct learns to fill blocks of 1, 2, 4, 8
#                             # SOURCE=FILE.gguf reads it from a file; TEXT=FOLDER: not the standard library but this
#
# The same command resumes after a stop (in a bucket add --resume=$OUT). Flags after the device go to train_tpu.py, of
# smollm to train_dream.py. OUT is the folder of the run, DATA that of the rows: keep both where they outlive the
# machine. Only cpu has been run whole; smollm with a step a stage, its stages one by one; the rest is compiled.
set -e

device=${1:?which machine? bash recipe.sh cpu, t4, v5e, v6e, v6e-16, score or smollm}
shift
out=${OUT:-out/recipe_$device}
data=${DATA:-data/recipe_$device}
github=codeparrot/codeparrot-clean # five million files, 50 GB; each row names its licence

# hours: training steps alone, PREDICTED by bench/compile_for.py, a lower bound; then bits per byte where measured
text=() packages=""
case $device in
cpu) ids=2048 row=512 train="--model=tiny --steps=3100" && export JAX_PLATFORMS=cpu ;; # 0.3 h, 1.06: measured
t4) packages=top:100 ids=8192 row=1024 train="--model=small --batch_size=32 --steps=1800" ;; # 0.8 h
v5e) packages=top:300 ids=8192 row=1024 train="--model=small --batch_size=128 --steps=6000" ;; # 0.8 h
v6e) text=("--hf=$github") ids=32768 row=2048 train="--model=300m --batch_size=64 --steps=33000" ;; # 9.8 h
v6e-16) text=("--hf=$github") ids=32768 row=2048 train="--model=1b --batch_size=64 --steps=164000 --log_every=100 --hosts=auto" ;; # 9.2 h
score | smollm) ;;
*) echo "recipe.sh $device: not one of cpu, t4, v5e, v6e, v6e-16, score, smollm" >&2 && exit 1 ;;
esac

if [ "$device" = smollm ]; then
    model=$out/token_by_token
    source=${SOURCE:-HuggingFaceTB/SmolLM2-135M-Instruct}
    [ -e "$model" ] || python convert_weights.py --source="$source" --to=dream --out="$model"
    text=(python)
    [ -z "$TEXT" ] || text=(text "$TEXT" --rows=packed)
    prepare=(python data_prep.py "${text[@]}" --seq_len=256 --out="$data")
    [ -e "$data/meta.json" ] || "${prepare[@]}" --tokenizer="$model/tokenizer.json" --eos="<|im_end|>"
    for size in 1 2 4 8; do
        run=$out/blocks_$size
        how=(--init="$model" --block_length=$size --batch_size=4 --steps=60 --eval_rows=4 --eval_every=30)
        if compgen -G "$run/checkpoints/[0-9]*" > /dev/null; then how=(--resume="$run"); fi
        python train_dream.py --out="$run" --data="$data" "${how[@]}" "$@"
        model=$run
        [ ! -e "$run/merged" ] || model=$run/merged # with --lora_rank
        texts=(--n=5 --entropy_bound=0.5 --max_new=48 --chat=off --prompt="Once upon a time")
        python generate_dream.py --ckpt="$model" "${texts[@]}"
    done
    exit
fi

if [ "$device" != score ]; then
    rows=$data && [[ $data == *://* ]] && rows=data/recipe_$device # data_prep.py writes to a disk
    if [ -n "$packages" ]; then
        text=(--roots "${rows}_source")
        [ -e "$rows/meta.json" ] || python extra/fetch_pypi.py "$packages" --out="${rows}_source"
    fi
    prepare=(python data_prep.py python "${text[@]}" --vocab_size=$ids --seq_len=$row --out="$rows")
    resume=()
    if compgen -G "$out/checkpoints/[0-9]*" > /dev/null; then
        resume=(--resume="$out")
    elif [ "$device" = v6e-16 ]; then # its hosts would all write the same
        echo "the rows are made on one machine, once: ${prepare[*]}"
        [ "$rows" = "$data" ] || echo "and copied: gcloud storage rsync -r $rows $data"
    else
        "${prepare[@]}"
        [ "$rows" = "$data" ] || gcloud storage rsync -r "$rows" "$data"
    fi
    python train_tpu.py --out="$out" --data="$data" $train "${resume[@]}" "$@"
fi
if [ "$device" != v6e-16 ]; then
    python train_tpu.py --eval_only="$out" --eval_rows=4096 ${DATA:+--data="$DATA"}
    step=$(ls "$out/checkpoints" | sort -n | tail -1)
    [ -e "$out/weights_$step" ] || python convert_weights.py --source="$out" --out="$out/weights_$step" --dtype=bfloat16
    python benchmarks.py --task=humaneval --ckpt="$out/weights_$step" --out="$out/humaneval_$step" --watch
fi
