// Talks with the server: what is typed, what is said, and one answer at a time.

import { Microphone } from "./microphone.js";
import { Player, RATE_HZ } from "./player.js";
import { base64Of, fetchModel, Realtime, saveKey } from "./realtime.js";
import { addAnswer, addMessage, askForKey, element, showFigures, showProblem, showStatus } from "./view.js";

const text = element("text");
const stop = element("stop");
const microphoneButton = element("microphone");

let realtime;
let answer = null; // {ask, id, view, item, asked_ms, active: it still comes, sounds}
let asks = 0; // a number for each answer asked for here, which comes back with it
let asked_ms = 0;
let asking = Promise.resolve(); // one question after the other
let speech = null; // {start_ms} of the turn that is being spoken
let microphoneOn = false;

const player = new Player(onPlayed);
const microphone = new Microphone((samples) => realtime.send("input_audio_buffer.append", { audio: base64Of(samples) }));

const handlers = {
  "error": onError,
  "session.updated": () => showProblem(""),
  "input_audio_buffer.speech_started": onSpeechStarted,
  "input_audio_buffer.speech_stopped": onSpeechStopped,
  "response.created": onAnswerCreated,
  "response.output_item.added": (event) => isOfAnswer(event.response_id) && (answer.item = event.item.id),
  "response.output_text.delta": (event) => isOfAnswer(event.response_id) && answer.view.append(event.delta),
  "response.output_audio_transcript.delta": (event) => isOfAnswer(event.response_id) && answer.view.append(event.delta),
  "response.output_audio.delta": (event) => isOfAnswer(event.response_id) && onSound(event.delta),
  "response.done": ({ response }) => isOfAnswer(response.id) && onAnswerDone(response),
};

function settings() {
  return {
    type: "realtime",
    output_modalities: [element("modality").value],
    ...(element("voice").value && { audio: { output: { voice: element("voice").value } } }),
  };
}

async function connect() {
  await realtime.connect();
  realtime.send("session.update", { session: settings() });
  showStatus("Ready");
}

function onClose() {
  showStatus("The connection is over; the next message opens another one.");
  if (microphoneOn) toggleMicrophone();
  endAnswer("broken off");
}

async function start() {
  let model;
  while (!model) {
    try {
      model = await fetchModel();
    } catch (error) {
      if (!error.needsKey) throw error;
      saveKey(await askForKey());
    }
  }
  element("model").textContent = model.id;
  element("voice").append(...model.voices.map((name) => new Option(name, name)));
  if (!model.voices.length) element("modality").value = "text";
  element("voice").disabled = element("modality").disabled = !model.voices.length;
  realtime = new Realtime(model.id, (event) => handlers[event.type]?.(event), onClose);
  await connect();
  element("send").disabled = false;
  microphoneButton.disabled = !navigator.mediaDevices;
  if (!window.isSecureContext) showProblem("Sound and microphone need HTTPS, or this page on localhost.");
}

async function ready() {
  showProblem("");
  if (window.isSecureContext) await player.open();
  if (!realtime.open) await connect();
}

async function ask(question) {
  await ready();
  await interrupt();
  addMessage("user", question);
  const item = { type: "message", role: "user", content: [{ type: "input_text", text: question }] };
  realtime.send("conversation.item.create", { item });
  askForAnswer();
}

function askForAnswer() {
  asked_ms = performance.now();
  const ask = String(++asks);
  expectAnswer({ ask });
  realtime.send("response.create", { response: { metadata: { ask } } });
}

function expectAnswer(known) {
  answer = { ask: null, id: null, item: null, view: addAnswer(), asked_ms, active: true, sounds: false, ...known };
  showFigures({ "first-audio": "–", "rtf": "–", "underruns": "–", "played": "–" });
  showStatus("Answering");
  stop.disabled = false;
}

const isOfAnswer = (id) => answer !== null && answer.id === id;

function onError({ error }) {
  if (error.code === "response_cancel_not_active") return;
  showProblem(error.message);
  if (answer && answer.id === null) {
    endAnswer("not answered");
    showStatus("Ready");
  }
}

// An answer that was asked for here, or one to a turn that the server heard.
function onAnswerCreated({ response }) {
  const ask = response.metadata?.ask;
  if (!ask) expectAnswer({ id: response.id });
  else if (answer?.ask === ask) answer.id = response.id;
}

function onSound(delta) {
  const now_ms = performance.now();
  if (!answer.sounds) showFigures({ "first-audio": `${Math.round(now_ms - answer.asked_ms)} ms` });
  answer.sounds = true;
  player.push(delta);
  const rtf = (now_ms - answer.asked_ms) / 1000 / (player.received / RATE_HZ);
  showFigures({ rtf: rtf.toFixed(2) });
}

function onPlayed({ played, missing, underruns, over }) {
  if (!answer?.sounds) return;
  showFigures({
    underruns: `${underruns} (${Math.round((missing / RATE_HZ) * 1000)} ms)`,
    played: `${(played / RATE_HZ).toFixed(2)} of ${(player.received / RATE_HZ).toFixed(2)} s`,
  });
  if (over) onSilence();
}

function onAnswerDone({ status, status_details }) {
  answer.active = false;
  const notes = { cancelled: "stopped", failed: status_details?.error?.message ?? "failed", incomplete: "cut at its limit" };
  answer.view.finish(notes[status]);
  if (answer.sounds) player.end();
  else onSilence();
}

// The answer is complete and played.
async function onSilence() {
  if (answer?.active) return;
  answer = null;
  stop.disabled = true;
  showStatus(microphoneOn ? "Listening" : "Ready");
  await player.stop();
}

function endAnswer(note) {
  answer?.view.finish(note);
  answer = null;
  stop.disabled = true;
}

// Ends the answer here and there; the server is told how much of it was heard.
async function interrupt() {
  const ended = answer;
  if (!ended) return;
  endAnswer("stopped");
  const { received } = player;
  if (ended.active) realtime.send("response.cancel", ended.id ? { response_id: ended.id } : {});
  const played = await player.stop();
  if (ended.item && ended.sounds) {
    showFigures({ played: `${(played / RATE_HZ).toFixed(2)} of ${(received / RATE_HZ).toFixed(2)} s` });
    const audio_end_ms = Math.floor((Math.min(played, received) / RATE_HZ) * 1000);
    realtime.send("conversation.item.truncate", { item_id: ended.item, content_index: 0, audio_end_ms });
  }
}

async function onSpeechStarted({ audio_start_ms }) {
  speech = { start_ms: audio_start_ms };
  microphoneButton.classList.add("speaking");
  showStatus("Listening to you");
  await interrupt();
}

function onSpeechStopped({ audio_end_ms }) {
  microphoneButton.classList.remove("speaking");
  if (!speech) return;
  addMessage("user", `spoken, ${((audio_end_ms - speech.start_ms) / 1000).toFixed(1)} s`, true);
  speech = null;
  asked_ms = performance.now();
}

async function toggleMicrophone() {
  microphoneOn = !microphoneOn;
  microphoneButton.setAttribute("aria-pressed", microphoneOn);
  if (!microphoneOn) {
    await microphone.stop();
    if (speech) finishSpeech();
    showStatus(realtime.open ? "Microphone off" : "Not connected");
    return;
  }
  try {
    await ready();
    await microphone.start();
    showStatus("Listening");
  } catch (error) {
    showProblem(`The microphone cannot be used: ${error.message}`);
    microphoneOn = false;
    microphoneButton.setAttribute("aria-pressed", false);
  }
}

// Who turns the microphone off has said all.
function finishSpeech() {
  speech = null;
  microphoneButton.classList.remove("speaking");
  addMessage("user", "spoken", true);
  realtime.send("input_audio_buffer.commit");
  askForAnswer();
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = text.value.trim();
  if (!question || element("send").disabled) return;
  text.value = "";
  showStatus("Asking");
  asking = asking.then(() => ask(question)).catch((error) => showProblem(error.message));
});
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  element("form").requestSubmit();
});
stop.addEventListener("click", async () => {
  await interrupt();
  showStatus("Stopped");
  text.focus();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && !stop.disabled && stop.click());
microphoneButton.addEventListener("click", toggleMicrophone);
for (const id of ["voice", "modality"]) {
  element(id).addEventListener("change", () => realtime.send("session.update", { session: settings() }));
}

start().catch((error) => {
  showStatus("Not connected");
  showProblem(error.message);
});
