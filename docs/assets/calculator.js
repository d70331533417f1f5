// The calculator of the page about sizes: the shape of a model → bytes of KV → what fits.
"use strict";
(() => {
  const SHAPES = {
    "Llama-3.1-8B": [32, 8, 128, 2, false],
    "Llama-3.1-70B": [80, 8, 128, 2, false],
    "Qwen2.5-7B": [28, 4, 128, 2, false],
    "DeepSeek-V3 (latent attention)": [61, 1, 576, 2, true],
    "SmolLM2-135M, float32 (our default)": [30, 3, 64, 4, false],
  };
  const place = document.getElementById("calculator");
  const round = (bytes, page) => Math.ceil(bytes / page) * page;

  /** What one rank keeps in `gib` of host memory: the arithmetic of `penstock.tiers.host`. */
  function size({ layers, heads, channels, bytes, latent, blockTokens, ranks, gib }) {
    const ownHeads = latent ? 1 : Math.max(1, heads / ranks);
    const tokenBytes = layers * ownHeads * channels * bytes * (latent ? 1 : 2);
    const blockBytes = tokenBytes * blockTokens;
    const slotBytes = round(blockBytes, blockBytes < 4096 ? 512 : 4096);
    const sumBytes = 8 * layers * ownHeads;
    const room = Math.floor(gib * 2 ** 30);
    let blocks = Math.floor(room / (slotBytes + sumBytes));
    while (blocks > 0 && round(blocks * sumBytes, 4096) + blocks * slotBytes > room) blocks -= 1;
    return { tokenBytes, blockBytes, blocks, tokens: blocks * blockTokens };
  }

  function field(name, label, value, attributes) {
    return `<label>${label}<input name="${name}" type="number" value="${value}" ${attributes}></label>`;
  }

  place.className = "calculator";
  place.innerHTML = `<form>
    <label>Model<select name="shape">${Object.keys(SHAPES).map((name) => `<option>${name}</option>`).join("")}
      <option>another</option></select></label>
    ${field("layers", "Layers", 32, "min=1")} ${field("heads", "KV heads", 8, "min=1")}
    ${field("channels", "Numbers a head", 128, "min=1")} ${field("bytes", "Bytes a number", 2, "min=1 max=4")}
    <label>Latent attention (MLA)<input name="latent" type="checkbox"></label>
    ${field("blockTokens", "Tokens a block", 16, "min=1")} ${field("ranks", "Ranks", 1, "min=1")}
    ${field("gib", "GiB for each rank", 64, "min=0 step=any")}
    ${field("prompt", "Tokens of a conversation", 4096, "min=1")}
  </form><output name="answer" aria-live="polite"></output>`;
  const form = place.querySelector("form");
  const output = place.querySelector("output");
  const count = (value) => value.toLocaleString("en", { maximumFractionDigits: 1 });

  function show() {
    const given = Object.fromEntries(
      [...form.elements].filter((each) => each.type === "number").map((each) => [each.name, Number(each.value)]),
    );
    given.latent = form.elements.latent.checked;
    if (![...form.elements].every((each) => each.validity.valid && each.value !== "")) {
      output.textContent = "One of the numbers is missing or not possible.";
      return;
    }
    if (!given.latent && given.heads % given.ranks && given.ranks % given.heads) {
      output.textContent = `${given.heads} KV heads cannot be split over ${given.ranks} ranks.`;
      return;
    }
    const { tokenBytes, blockBytes, blocks, tokens } = size(given);
    const machine = given.latent ? given.gib : given.gib * given.ranks;
    output.textContent =
      `${count(tokenBytes / 1024)} KiB a token and ${count(blockBytes / 1024)} KiB a block on each rank. ` +
      `${count(given.gib)} GiB hold ${count(blocks)} blocks: ${count(tokens)} tokens, ` +
      `${count(Math.floor(tokens / given.prompt))} conversations of ${count(given.prompt)} tokens. ` +
      `All ranks together take ${count(machine)} GiB.`;
  }

  function choose() {
    const shape = SHAPES[form.elements.shape.value];
    if (shape) {
      ["layers", "heads", "channels", "bytes"].forEach((name, at) => (form.elements[name].value = shape[at]));
      form.elements.latent.checked = shape[4];
    }
    show();
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    if (event.target.name === "shape") choose();
    else {
      if (["layers", "heads", "channels", "bytes", "latent"].includes(event.target.name)) {
        form.elements.shape.value = "another";
      }
      show();
    }
  });
  window.penstockSize = size; // For the test that compares it with Python.
  choose();
})();
