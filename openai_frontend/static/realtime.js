// The WebSocket of /v1/realtime: events in both directions.

const KEY = "omni-api-key";

export const savedKey = () => sessionStorage.getItem(KEY) ?? "";
export const saveKey = (key) => sessionStorage.setItem(KEY, key);

// The model served here. Throws with `needsKey` when the server wants another key than the saved one.
export async function fetchModel() {
  const headers = savedKey() ? { authorization: `Bearer ${savedKey()}` } : {};
  const answer = await fetch("/v1/models", { headers });
  if (answer.status === 401) throw Object.assign(new Error("This server asks for a key."), { needsKey: true });
  if (!answer.ok) throw new Error(`The server answers with status ${answer.status}.`);
  return (await answer.json()).data[0];
}

export class Realtime {
  // `onEvent` takes each event of the server; `onClose` is called when the connection is over.
  constructor(model, onEvent, onClose) {
    Object.assign(this, { model, onEvent, onClose, socket: null });
  }

  get open() {
    return this.socket?.readyState === WebSocket.OPEN;
  }

  // Resolves when events can be sent.
  connect() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const protocols = ["realtime", ...(savedKey() ? [`openai-insecure-api-key.${savedKey()}`] : [])];
    const socket = new WebSocket(`${scheme}://${location.host}/v1/realtime?model=${encodeURIComponent(this.model)}`, protocols);
    this.socket = socket;
    return new Promise((resolve, reject) => {
      socket.onopen = resolve;
      socket.onmessage = (message) => this.onEvent(JSON.parse(message.data));
      socket.onclose = () => {
        reject(new Error("The server does not take the connection."));
        this.onClose();
      };
    });
  }

  send(type, fields = {}) {
    if (this.open) this.socket.send(JSON.stringify({ type, ...fields }));
  }
}

// int16 little-endian samples as base64, both ways.
export function samplesOf(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length >> 1 }, (_, i) => view.getInt16(2 * i, true) / 32768);
}

export function base64Of(samples) {
  const view = new DataView(new ArrayBuffer(2 * samples.length));
  samples.forEach((sample, i) => view.setInt16(2 * i, Math.max(-1, Math.min(1, sample)) * 32767, true));
  return btoa(String.fromCharCode(...new Uint8Array(view.buffer)));
}
