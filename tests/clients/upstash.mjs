// Upstash's own clients against the endpoint of UPSTASH_REDIS_REST_URL; prints a line of JSON a check.
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { Ratelimit } from "@upstash/ratelimit";
import { Redis } from "@upstash/redis";

const options = { enableTelemetry: false, retry: false };
const redis = Redis.fromEnv(options);
const plain = Redis.fromEnv({ ...options, responseEncoding: false, automaticDeserialization: false });
const run = `node-${process.pid}-${Date.now()}`;
const key = (name) => `${run}:${name}`;

const checks = {
  async strings() {
    assert.equal(await redis.set(key("a"), "grüße 日本語 🎉", { ex: 60 }), "OK");
    assert.equal(await redis.get(key("a")), "grüße 日本語 🎉");
    assert.equal(await plain.get(key("a")), "grüße 日本語 🎉");
    assert.equal(await redis.get(key("none")), null);
    const ttl = await redis.ttl(key("a"));
    assert.ok(ttl > 50 && ttl <= 60);
    assert.equal(await redis.set(key("a"), "other", { nx: true }), null);
    assert.equal(await redis.set(key("ok"), "OK"), "OK");
    assert.equal(await redis.get(key("ok")), "OK");
    assert.equal(await redis.set(key("empty"), ""), "OK");
    assert.equal(await plain.get(key("empty")), "");
  },
  async objects() {
    const value = { name: "x", list: [1, 2.5, null, "OK"], deep: { ok: true } };
    await redis.set(key("json"), value);
    assert.deepEqual(await redis.get(key("json")), value);
    await redis.hset(key("hash"), { one: 1, two: "zwei", three: { x: 3 } });
    assert.deepEqual(await redis.hgetall(key("hash")), { one: 1, two: "zwei", three: { x: 3 } });
  },
  async nested() {
    await redis.mset({ [key("m1")]: "OK", [key("m2")]: "two" });
    assert.deepEqual(await redis.mget(key("m1"), key("m2"), key("none")), ["OK", "two", null]);
    await redis.sadd(key("set"), "a", "b");
    assert.deepEqual((await redis.smembers(key("set"))).sort(), ["a", "b"]);
    await redis.rpush(key("list"), "OK", "b");
    assert.deepEqual(await redis.lrange(key("list"), 0, -1), ["OK", "b"]);
    await redis.zadd(key("zset"), { score: 1.5, member: "x" }, { score: 2, member: "y" });
    assert.deepEqual(await redis.zrange(key("zset"), 0, -1, { withScores: true }), ["x", 1.5, "y", 2]);
  },
  async pipelines() {
    const results = await redis.pipeline().set(key("p"), 1).incr(key("p")).get(key("p")).exec();
    assert.deepEqual(results, ["OK", 2, 2]);
    const kept = await redis.pipeline().lpush(key("p"), "x").get(key("p")).exec({ keepErrors: true });
    assert.match(kept[0].error, /WRONGTYPE/);
    assert.equal(kept[1].result, 2);
    // the client sends writes of one moment as one pipeline, and reads as another: only writes have an order
    const auto = await Promise.all([redis.incr(key("q")), redis.incr(key("q")), redis.incrby(key("q"), 0)]);
    assert.deepEqual(auto, [1, 2, 2]);
  },
  async transactions() {
    assert.deepEqual(await redis.multi().set(key("t"), "v").get(key("t")).exec(), ["OK", "v"]);
    await assert.rejects(redis.multi().set(key("t"), "w").lpush(key("t"), "x").exec(), /WRONGTYPE/);
    assert.equal(await redis.get(key("t")), "w");
  },
  async errors() {
    await redis.set(key("word"), "x");
    await assert.rejects(redis.incr(key("word")), /ERR value is not an integer/);
    await assert.rejects(redis.flushall(), /ERR Command is not available: 'FLUSHALL'/);
    await assert.rejects(redis.keys("*"), /'KEYS'/);
    const wrong = new Redis({ url: process.env.UPSTASH_REDIS_REST_URL, token: "wrong", ...options });
    await assert.rejects(wrong.get("a"), /Unauthorized/);
  },
  async scripts() {
    for (const first of ["", "#!lua flags=allow-key-locking\n"]) {
      const text = `${first}return {KEYS[1], ARGV[1], '${run}', 7}`;
      const sha = createHash("sha1").update(text).digest("hex");
      await assert.rejects(redis.evalsha(sha, [key("k")], ["v"]), /NOSCRIPT/);
      assert.deepEqual(await redis.scriptExists(sha), [0]);
      assert.equal(await redis.scriptLoad(text), sha);
      assert.deepEqual(await redis.scriptExists(sha), [1]);
      assert.deepEqual(await redis.evalsha(sha, [key("k")], ["v"]), [key("k"), "v", run, 7]);
      const script = redis.createScript(`${text} --`);
      assert.deepEqual(await script.exec([key("k")], ["w"]), [key("k"), "w", run, 7]);
      assert.deepEqual(await script.exec([key("k")], ["x"]), [key("k"), "x", run, 7]);
    }
  },
};

const limiters = {
  fixedWindow: Ratelimit.fixedWindow(5, "60 s"),
  slidingWindow: Ratelimit.slidingWindow(5, "60 s"),
  tokenBucket: Ratelimit.tokenBucket(5, "60 s", 5),
};
for (const [name, limiter] of Object.entries(limiters)) {
  checks[`ratelimit ${name}`] = async () => {
    const limit = new Ratelimit({ redis, limiter, prefix: key(name), ephemeralCache: false });
    const answers = [];
    for (let i = 0; i < 7; i++) answers.push(await limit.limit("someone"));
    assert.deepEqual(answers.map((a) => a.success), [true, true, true, true, true, false, false]);
    assert.deepEqual(answers.slice(0, 5).map((a) => a.remaining), [4, 3, 2, 1, 0]);
    assert.equal((await limit.getRemaining("someone")).remaining, 0);
    assert.ok((await limit.limit("someone else")).success);
    await limit.resetUsedTokens("someone");
    assert.ok((await limit.limit("someone")).success);
  };
}

let failed = 0;
for (const [check, body] of Object.entries(checks)) {
  try {
    await body();
    console.log(JSON.stringify({ check, ok: true }));
  } catch (error) {
    failed += 1;
    console.log(JSON.stringify({ check, ok: false, error: String(error?.stack ?? error) }));
  }
}
process.exit(failed ? 1 : 0);
