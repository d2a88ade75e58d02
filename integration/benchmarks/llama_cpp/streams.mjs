// Tokens per second of llama.cpp through node-llama-cpp: greedy, all streams in one batch.
//
//     node streams.mjs MODULES MODEL.gguf PROMPTS.json THREADS STREAMS NEW_TOKENS
//
// MODULES is the node_modules that has node-llama-cpp; PROMPTS.json a list of lists of token ids, of
// which the first STREAMS are read, all of one length. Prints one line of JSON:
//
// tokens_per_s  STREAMS * (NEW_TOKENS - 1) over the seconds after each stream has its first token
// prompt_ms     the pass of the prompts, with the first token of each stream
//
// The addon is driven as the queue of node-llama-cpp drives it, so that no time of that queue, which
// is JavaScript, is in the figures.
import {execFileSync} from "node:child_process";
import fs from "node:fs";
import path from "node:path";
import {pathToFileURL} from "node:url";

const [modules, modelPath, promptsPath, threads_, streams_, count_] = process.argv.slice(2);
const [threads, streams, count] = [threads_, streams_, count_].map(Number);
if (process.env.UV_THREADPOOL_SIZE !== String(threads)) {
    // The pool of threads that decodes is sized when the process starts.
    const env = {...process.env, UV_THREADPOOL_SIZE: String(threads)};
    execFileSync(process.execPath, process.argv.slice(1), {env, stdio: "inherit"});
    process.exit(0);
}
const home = path.resolve(modules, "node-llama-cpp");
const own = JSON.parse(fs.readFileSync(path.join(home, "package.json")));
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(path.join(home, "dist/index.js")));
const prompts = JSON.parse(fs.readFileSync(promptsPath)).slice(0, streams);
const length = prompts[0].length;
const llama = await getLlama({
    gpu: false, build: "never", progressLogs: false, maxThreads: 0, logLevel: LlamaLogLevel.error,
    logger: (level, text) => console.error(text)
});
const model = await llama.loadModel({modelPath: path.resolve(modelPath), gpuLayers: 0});
const context = await model.createContext({
    sequences: streams, contextSize: length + count, batchSize: Math.max(streams * length, 64), threads,
    flashAttention: true
});

async function run(steps) {
    const ctx = context._ctx;
    ctx.setThreads(threads);
    const samplers = prompts.map(() => {
        const sampler = new llama._bindings.AddonSampler(model._model);
        sampler.applyConfig({temperature: 0});
        return sampler;
    });
    const made = prompts.map(() => []);
    const pass = async (feed, position) => {
        ctx.initBatch(streams * feed[0].length);
        const at = feed.map((ids, s) =>
            ctx.addToBatch(s, position, Uint32Array.from(ids), Uint32Array.of(ids.length - 1))[0]);
        await ctx.decodeBatch();
        const next = await Promise.all(at.map((index, s) => ctx.sampleToken(index, samplers[s])));
        next.forEach((token, s) => made[s].push(token));
    };
    const start = performance.now();
    await pass(prompts, 0);
    const first = performance.now();
    for (let step = 1; step < steps; step++)
        await pass(made.map((ids) => [ids[ids.length - 1]]), length + step - 1);
    const end = performance.now();
    samplers.forEach((sampler) => sampler.dispose());
    prompts.forEach((_, s) => ctx.disposeSequence(s));
    return {made, prompt_ms: first - start, decode_ms: end - first};
}

await run(4); // Pages of the weights, and graphs.
const {made, prompt_ms, decode_ms} = await run(count);
console.log(JSON.stringify({
    tokens_per_s: streams * (count - 1) / decode_ms * 1000,
    prompt_ms,
    ids: made[0],
    version: `node-llama-cpp ${own.version}, llama.cpp ${llama.llamaCppRelease.release}`
}));
await llama.dispose();
