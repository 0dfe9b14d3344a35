#!/bin/sh
# The studies of the worked example, report.html: every kind, on a machine of two cores, in about half an hour.
# Run it in an empty folder, with deepex[peers] installed and nothing else running.
set -e
mkdir -p disk
deepex study strong fashion --ranks 1,2,4 --to-target "validation error <= 0.25" --to-target "validation error <= 0.2" --out studies/strong
deepex study transfer fashion --ranks 4 --seconds 0.1 --out studies/transfer
deepex study weak fashion --ranks 1,2,4 --epochs 3 --out studies/weak
deepex study frameworks fashion --ranks 2 --set samples=6000 --epochs 4 --out studies/frameworks
deepex study variability fashion --ranks 2 --set samples=2000 --out studies/variability
deepex study sync fashion --ranks 2 --set replicas=8 --strategies gradients,weights,auto --periods 1,4,epoch --epochs 16 \
    --to-target "validation error <= 0.2" --out studies/sync
deepex study storage fashion --ranks 2 --directories disk,/dev/shm --set samples=2000 --epochs 3 --out studies/storage
deepex study threads fashion --threads 1,2 --set samples=800 --epochs 3 --out studies/threads
deepex report studies -o report.html --title "Every study of DeepEx, on two cores"
